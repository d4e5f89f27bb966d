"""Ray Serve with the linear model of the load test, run by Ray's own python: PORT. A line of stdin updates it."""

import sys

import numpy as np
import ray
from ray import serve
from starlette.requests import Request

WEIGHT = np.array([[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]], np.float32)


@serve.deployment(num_replicas=1, max_ongoing_requests=100)
class Sums:
    def __init__(self, scale: float) -> None:
        self.weight = WEIGHT * scale

    async def __call__(self, request: Request) -> dict[str, int]:
        row = np.array(await request.json(), np.float32)
        return {"prediction": int((self.weight @ row).argmax())}


def main() -> None:
    ray.init(include_dashboard=False, log_to_driver=False, num_cpus=2)
    serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
    for line in sys.stdin:
        bound = Sums.bind(1.0 + int(line) / 100)  # type: ignore[attr-defined]
        serve.run(bound, name="sums", route_prefix="/")
        print("updated", flush=True)
    ray.shutdown()


main()
