"""python -m megajax is the command megajax."""

from megajax.cli import main

if __name__ == "__main__":
    main()
