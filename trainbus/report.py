"""Report metrics from any script: ``from trainbus.report import report``, as in earlier versions."""

from trainbus.script import report

__all__ = ["report"]
