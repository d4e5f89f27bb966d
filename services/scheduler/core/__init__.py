"""What the scheduler decides; pure: a fold over facts, and decisions out of it.

``fold`` adds up facts to the cluster in ``state``. ``decide`` runs the ``steps`` of a scheduling cycle, which return
``decisions``: ``order`` sorts the queue, ``place`` finds slots, ``quota`` limits them, ``victims`` selects preemptions,
and ``reasons`` describes why the other runs wait. ``admission`` checks new requests, ``explain`` answers queries, and
``capacity`` computes the demand for nodes. ``policy_features`` says which features interact.
import-linter enforces which of them may import which.
"""
