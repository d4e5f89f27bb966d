from services.worker.app import build
from services.worker.launch.process_hardening import hide_from_ranks
from services.worker.settings import WorkerSettings

if __name__ == "__main__":
    hide_from_ranks()
    build(WorkerSettings()).main()
