"""Tracking: keeps MLflow in step with the stream of facts. The only service that talks to MLflow."""
