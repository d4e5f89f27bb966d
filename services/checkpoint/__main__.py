from services.checkpoint.app import main

main()
