"""The rank, its device, and the process group of all ranks."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from contracts.ranks import MEMORY_FRACTION_VARIABLE
from trainbus.trainer.rendezvous import SayMissing, has_duplicates, meet

#: Names the machine, in all of its containers.
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
#: How long the ranks of a generation wait for each other in a collective.
COLLECTIVE_TIMEOUT = timedelta(seconds=600)


class WorldError(Exception):
    """The ranks and the devices of a node do not fit together; the text says what to change."""


class PeerLostError(RuntimeError):
    """Another rank is gone, and what it had to send did not arrive. Raised where gloo raises its own error."""


@dataclass(frozen=True, slots=True)
class World:
    """This process's rank among all ranks, and the collectives on small objects."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> World:
        """Read the variables that the agent (or torchrun) sets; without them this is the only rank."""
        return cls(int(env.get("RANK", "0")), int(env.get("WORLD_SIZE", "1")), int(env.get("LOCAL_RANK", "0")))

    @property
    def device(self) -> torch.device:
        if not torch.cuda.is_available():
            return torch.device("cpu")
        count = torch.cuda.device_count()
        # A process can use one MIG slice only, so the agent shows each rank its own.
        index = 0 if count == 1 else self.local_rank
        if index >= count:
            raise WorldError(
                f"local rank {self.local_rank} has no GPU: this process sees {count}. Give each rank one in "
                "CUDA_VISIBLE_DEVICES, or each of them its own"
            )
        return torch.device("cuda", index)

    @property
    def gpu(self) -> torch.device | None:
        """The rank's device if it is a GPU."""
        return self.device if self.device.type == "cuda" else None

    def bind_thread(self) -> None:
        """Make the rank's device the current one of the calling thread.

        In CUDA each thread has a current device, which begins as device 0: what names no device (a communicator, an
        object that is sent, pinned memory, an event) would gather there, with a context of every rank.
        """
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def init_process_group(
        self, env: Mapping[str, str], always: bool = False, say: SayMissing = lambda *_: None
    ) -> None:
        """Form the process group at MASTER_ADDR:MASTER_PORT; a single rank does so only if ``always``.

        ``say`` is called, in any thread, once the ranks have waited for some that do not come.
        """
        if self.size == 1 and not always:
            return
        store = meet(self.rank, self.size, env.get("MASTER_ADDR", "127.0.0.1"), int(env.get("MASTER_PORT", "0")), say)
        # NCCL refuses two ranks on one GPU, be it on shares of it or on MIG slices.
        uses_nccl = self.gpu is not None and not has_duplicates(store, self.size, _board_of(self.gpu))
        dist.init_process_group(
            "nccl" if uses_nccl else "gloo",
            store=store,
            rank=self.rank,
            world_size=self.size,
            timeout=COLLECTIVE_TIMEOUT,
            device_id=self.gpu if uses_nccl else None,
        )

    def confirm_arrival(self) -> None:
        """Wait until all that the ranks have sent each other is here: call it before anything is made of it.

        It costs nothing with gloo, whose collectives raise when a peer is gone. Those of NCCL are aborted then
        (``peers.abort_communicator``) and end as if all were well, with whatever was there as their result. So the
        ranks add up ones behind what they sent, in the communicator's order, and the host waits for the sum: the price
        of one small all-reduce, and of a host that runs no further ahead.

        Raises:
            PeerLostError: the communicator was aborted.
        """
        if self.size == 1 or dist.get_backend() != "nccl":
            return
        present = torch.ones(1, dtype=torch.float32, device=self.device)
        dist.all_reduce(present)
        if present.tolist() != [self.size]:
            raise PeerLostError("a peer is gone: what it had to send did not arrive")

    @contextmanager
    def confirmed(self) -> Iterator[None]:
        """Confirm what arrives in this block, also where it is so wrong that the block fails."""
        try:
            yield
        except Exception:
            self.confirm_arrival()
            raise
        self.confirm_arrival()

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum ``tensor`` over the ranks, in place. Under NCCL the sum is not confirmed yet."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def sum_on_host(self, tensor: torch.Tensor) -> Any:
        """Return the sum of ``tensor`` over the ranks as numbers, in lists as deep as its shape.

        Raises:
            RuntimeError: a rank is gone.
        """
        self.all_reduce(tensor)
        self.confirm_arrival()
        return tensor.tolist()

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """Return the ``source`` rank's value of a small picklable object on every rank."""
        if self.size == 1:
            return value
        box = [value]
        with self.confirmed():
            dist.broadcast_object_list(box, src=source, device=self.device)
        return box[0]

    def all_gather_objects(self, value: Any) -> list[Any]:
        """Return every rank's value of a small picklable object, by rank, on every rank."""
        if self.size == 1:
            return [value]
        box: list[Any] = [None] * self.size
        with self.confirmed():
            dist.all_gather_object(box, value)
        return box

    def send_bytes(self, pieces: Iterable[bytes]) -> None:
        """Send pieces of any size to rank 0, which calls ``receive_bytes`` for this rank."""
        for piece in chain(pieces, (b"",)):
            dist.send_object_list([piece], dst=0, device=self.device)

    def receive_bytes(self, rank: int) -> Iterator[bytes]:
        """Yield what another rank sends to this one, rank 0."""
        while True:
            box: list[Any] = [None]
            dist.recv_object_list(box, src=rank, device=self.device)
            if not box[0]:
                return
            yield box[0]

    def wait_for_all(self) -> None:
        """Wait until every rank is here, so that none loses the rendezvous while it still needs it."""
        if dist.is_initialized() and self.size > 1:
            dist.barrier()


def _board_of(gpu: torch.device) -> str:
    """Return a name for the whole GPU that a device is, or is a slice of, among all machines."""
    try:
        machine = BOOT_ID.read_text().strip()
    except OSError:
        machine = socket.gethostname()
    found = torch.cuda.get_device_properties(gpu)
    bus = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}"  # type: ignore[attr-defined]
    return f"{machine}/{bus}"


def limit_threads(env: Mapping[str, str]) -> None:
    """Give this rank one thread for its arithmetic on CPU unless OMP_NUM_THREADS says otherwise.

    A CPU slot stands for one core, and ranks that each start a thread for every core thrash. The
    number of threads also changes the last bits of a sum, so it must not depend on what else runs on the node.
    """
    torch.set_num_threads(max(1, int(env.get("OMP_NUM_THREADS") or 1)))


def limit_memory(env: Mapping[str, str], device: torch.device) -> None:
    """Limit this rank's tensors to its run's share of the GPU's memory (TRAINBUS_MEMORY_FRACTION).

    Beyond it torch raises ``OutOfMemoryError``, as if the GPU were no larger.
    """
    fraction = env.get(MEMORY_FRACTION_VARIABLE)
    if fraction and device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(float(fraction), device)


def seed_all(*parts: int | str) -> None:
    """Seed torch (all devices), numpy and random from a hash of ``parts``."""
    digest = sha256("\0".join(str(part) for part in parts).encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    np.random.seed(int.from_bytes(digest[8:12], "little"))
    random.seed(digest)
