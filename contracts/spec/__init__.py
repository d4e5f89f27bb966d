"""What a request says about a run, by what it is about; ``contracts/events/train.py`` has the requests."""
