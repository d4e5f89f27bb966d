from services.evaluation.app import build
from services.kit.settings import Settings

build(Settings()).main()
