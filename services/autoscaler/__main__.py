from services.autoscaler.app import build
from services.kit.settings import Settings

build(Settings()).main()
