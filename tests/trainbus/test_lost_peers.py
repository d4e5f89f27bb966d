"""A peer is gone under NCCL, which hands out what was there: nothing is concluded from it."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from services.kit.ports import free_ports
from tests.trainbus.fake_cuda import FakeCuda
from trainbus.trainer.step_agreement import StepAgreement
from trainbus.trainer.strategies.base import Strategy
from trainbus.trainer.world import PeerLostError, World

pytestmark = pytest.mark.shell

Use = Callable[[World], object]


def compare(world: World) -> object:
    return StepAgreement(world, 2).compare(torch.ones(2, dtype=torch.float64, device=world.device))


def agree(world: World) -> object:
    return StepAgreement(world, 2).agree(lacking=False, stop=False)


def sum_weights(world: World) -> object:
    return StepAgreement(world, 2).sum_weights({world.rank: 1.0}, has_empty=False)


def broadcast(world: World) -> object:
    return world.broadcast_object("from rank 1", 1)


def gather(world: World) -> object:
    return world.all_gather_objects(world.rank)


def sync_buffers(world: World) -> object:
    model = nn.BatchNorm1d(2, device=world.device)
    Strategy.sync_buffers(SimpleNamespace(_world=world, model=model))  # type: ignore[arg-type]
    return model.state_dict()


def _rank(use: Use, env: Mapping[str, str], answers: Connection) -> None:
    """Meet the others; rank 1 then ends, and rank 0 uses the communicator, which is aborted once that hangs."""
    cuda = FakeCuda(2)
    cuda.install()
    world = World.from_env(env)
    world.init_process_group(env)
    world.wait_for_all()
    if world.rank == 1:
        os._exit(0)
    cuda.aborted.set()
    try:
        answers.send(repr(use(world)))
    except Exception as error:
        answers.send(error)
    os._exit(0)


@pytest.mark.parametrize("use", [compare, agree, sum_weights, broadcast, gather, sync_buffers])
def test_nothing_is_concluded_from_what_did_not_arrive(use: Use) -> None:
    context = multiprocessing.get_context("fork")
    port, (ours, theirs) = str(free_ports(1)[0]), context.Pipe(duplex=False)
    processes = []
    for rank in range(2):
        env = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": port}
        processes.append(context.Process(target=_rank, args=(use, env, theirs)))
        processes[-1].start()
    theirs.close()
    try:
        found = ours.recv()
    finally:
        for process in processes:
            process.join()
    assert isinstance(found, PeerLostError), found
