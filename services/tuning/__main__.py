from services.kit.settings import Settings
from services.tuning.app import build

build(Settings()).main()
