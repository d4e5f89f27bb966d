from services.worker.app import build
from services.worker.launch.process_hardening import protect_credentials
from services.worker.settings import WorkerSettings

if __name__ == "__main__":
    protect_credentials()
    build(WorkerSettings()).main()
