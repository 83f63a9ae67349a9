"""`python -m eagle`: the same as the console script."""

from eagle.cli import main

if __name__ == "__main__":
    main()
