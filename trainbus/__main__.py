from trainbus.commands.main import main

main()
