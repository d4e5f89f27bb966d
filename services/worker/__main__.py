from services.worker.app import build
from services.worker.settings import WorkerSettings

if __name__ == "__main__":
    build(WorkerSettings()).main()
