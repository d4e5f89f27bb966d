from trainbus.cli.main import main

main()
