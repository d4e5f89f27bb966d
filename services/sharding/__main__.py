"""Turns an index of records into shards, their offsets and a manifest; ``gc`` removes what has no reference."""

from services.kit import garbage_collector
from services.sharding.app import build
from services.sharding.garbage_collection import GARBAGE
from services.sharding.settings import ShardingSettings

garbage_collector.main("sharding", build, ShardingSettings(), GARBAGE)
