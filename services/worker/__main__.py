from services.worker.app import build, protect_credentials
from services.worker.settings import WorkerSettings

if __name__ == "__main__":
    protect_credentials()
    build(WorkerSettings()).main()
