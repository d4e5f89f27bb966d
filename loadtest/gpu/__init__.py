"""What trainbus does on a GPU: one command, one table (``python -m loadtest.gpu``)."""
