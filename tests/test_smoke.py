from services.kit.lease import Lease
from contracts import topology
async def test_lease(bus):
    b = await bus.bucket(topology.LEASES)
    a, c = Lease(b, "x", "a", 1.0), Lease(b, "x", "c", 1.0)
    assert await a.try_acquire() and not await c.try_acquire()
    assert await a.renew()
    await a.release()
    assert await c.try_acquire()
async def test_s3(objects, s3_settings):
    await objects.put(f"s3://{s3_settings.bucket_lake}/a", b"x")
