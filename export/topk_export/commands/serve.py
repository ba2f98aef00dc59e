"""``topk-registry serve``: serve an exported model over HTTP, with a page to try the model."""

from collections.abc import Sequence

from topk_export.commands.common import add_runtime_flags, command, say
from topk_registry.cli import ArgumentParser, positive, within

LOOPBACK = ("localhost", "127.0.0.1", "::1")


@command
def main(argv: Sequence[str]) -> int:
    """Serve an exported file over HTTP."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.host not in LOOPBACK and not args.allowed_hosts:
        parser.error("--host that is not loopback needs --allowed-hosts with the names that clients use")
    try:
        from topk_export.serve.limits import Limits
        from topk_export.serve.server import listen, make_server
    except ModuleNotFoundError as error:
        raise ImportError(f"{error.name} is not installed: pip install 'topk-registry[serve]'") from error
    from topk_export.runtime.predictor import Predictor

    predictor = Predictor(
        args.model,
        device=args.device,
        require_gpu=args.require_gpu,
        threads=args.threads,
        max_pixels=args.max_pixels,
    )
    limits = Limits(
        body_bytes=args.max_body,
        images=args.max_images,
        pixels=args.max_pixels,
        request_pixels=4 * args.max_pixels,
        queue=max(args.queue, args.max_images),
        batch=args.max_batch,
        request_seconds=args.timeout,
    )
    names = [name.lower().strip("[]") for name in args.allowed_hosts]
    server = make_server(predictor, limits, [*LOOPBACK, *names], access_log=args.access_log)
    with listen(args.host, args.port) as listener:
        host = f"[{args.host}]" if ":" in args.host else args.host
        say(f"{args.model} on {predictor.device}: http://{host}:{listener.getsockname()[1]}/")
        if forced := (predictor.metadata.sets or {}).get("forced"):
            say(f"warning: the prediction sets have no guarantee: {forced}")
        server.run(sockets=[listener])
    return 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="topk-registry serve", description=main.__doc__)
    add = parser.add_argument
    add("model", metavar="model.onnx", help="a file of topk-registry export")
    add("--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on (default: 127.0.0.1)")
    add("--port", type=within("[0, 65535]", int), default=8000, metavar="N", help="0 chooses one (default: 8000)")
    add(
        "--allowed-hosts",
        nargs="+",
        default=[],
        metavar="NAME",
        help="allowed names in the Host header, in addition to loopback names",
    )
    add("--max-body", type=positive, default=10_000_000, metavar="BYTES", help="length of a body (default: 10000000)")
    add("--max-images", type=positive, default=32, metavar="N", help="images per request (default: 32)")
    add(
        "--max-pixels",
        type=positive,
        default=25_000_000,
        metavar="N",
        help="pixels of an image, before or after resizing (default: 25000000)",
    )
    add("--max-batch", type=positive, default=16, metavar="N", help="images per run of the model (default: 16)")
    add("--queue", type=positive, default=128, metavar="N", help="images in progress; above it, 503 (default: 128)")
    add("--timeout", type=within("(0, inf)"), default=60.0, metavar="S", help="seconds for an answer (default: 60)")
    add("--access-log", action="store_true", help="log each request on stderr")
    add_runtime_flags(parser)
    return parser
