"""Runs that are requested have ``python -m trainbus.script_evaluation`` in their command, so it has a fixed place."""

import os
import sys

from trainbus.evaluation.script_evaluation import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
