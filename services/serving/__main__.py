from services.kit.settings import Settings
from services.serving.app import build

build(Settings()).main()
