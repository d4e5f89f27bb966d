from services.worker.app import build, protect_credentials
from services.worker.launch.init_process import leave_first_place
from services.worker.settings import WorkerSettings

if __name__ == "__main__":
    protect_credentials()
    leave_first_place()
    build(WorkerSettings()).main()
