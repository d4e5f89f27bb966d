"""``python -m services.gateway`` serves; ``python -m services.gateway rebuild`` builds the read model again."""

import sys

from services.gateway import rebuild
from services.gateway.app import build
from services.gateway.settings import GatewaySettings

settings = GatewaySettings()
if sys.argv[1:2] == ["rebuild"]:
    rebuild.main(settings, sys.argv[2:])
else:
    build(settings).main()
