from services.ingestion.app import build
from services.ingestion.settings import IngestionSettings

build(IngestionSettings()).main()
