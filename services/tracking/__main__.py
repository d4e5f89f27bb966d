from services.tracking.app import build
from services.tracking.settings import TrackingSettings

build(TrackingSettings()).main()
