from services.scheduler.app import SchedulerSettings, build

build(SchedulerSettings()).main()
