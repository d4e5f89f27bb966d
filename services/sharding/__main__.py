"""Turns an index of records into shards, their offsets and a manifest; ``gc`` removes what nobody needs."""

from services.sharding.app import main

main()
