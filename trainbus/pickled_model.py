"""Models that are logged in MLflow name this module in ``pickle_module_info.txt``, so it has a fixed place."""

from trainbus.model.pickle_module import Pickler, Unpickler, dump, dumps, load

__all__ = ["Pickler", "Unpickler", "dump", "dumps", "load"]
