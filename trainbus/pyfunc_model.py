"""Models that are logged in MLflow name this module as their ``loader_module``, so it has a fixed place."""

from trainbus.model.pyfunc import _load_pyfunc

__all__ = ["_load_pyfunc"]
