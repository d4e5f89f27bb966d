from services.kit.settings import Settings
from services.sharding.app import build

build(Settings()).main()
