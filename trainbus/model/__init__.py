"""A Task's model outside its run: loaded from a folder, by MLflow, and in a process that serves it."""
