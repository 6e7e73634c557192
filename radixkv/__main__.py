"""``python -m radixkv`` and the ``radixkv`` command."""


def main() -> None:
    """Run the command line; what is heavy is loaded by the command that needs it."""
    from radixkv.service.cli import app

    app(prog_name="radixkv")


if __name__ == "__main__":
    main()
