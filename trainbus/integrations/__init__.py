"""Metrics, checkpoints, resume and stop for scripts on Lightning, Hugging Face Trainer and Accelerate; MLflow.

Each module needs its library and nothing else: ``lightning``, ``huggingface``, ``accelerate``, ``mlflow_store``.
Outside a run they do no harm, like the calls of ``trainbus`` that they make.
"""
