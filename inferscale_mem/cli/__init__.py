"""The command line: one module or package per subcommand, each with ``add_arguments`` and ``run``; see main.py."""
