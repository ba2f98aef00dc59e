"""``topk-registry serve``: serve an exported model over HTTP, with a web page to try the model."""

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
        parser.error("a --host other than localhost needs --allowed-hosts with the names that clients use")
    try:
        from topk_export.serve.reading import Limits
        from topk_export.serve.server import listen, make_server
    except ModuleNotFoundError as error:
        raise ImportError(f"{error.name} is not installed: in the checkout, pip install -e '.[serve]'") from error
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
    add("model", metavar="model.onnx", help="an ONNX file that topk-registry export, attach or calibrate wrote")
    add("--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on (default: 127.0.0.1)")
    port = "port to listen on; 0 selects a free port (default: 8000)"
    add("--port", type=within("[0, 65535]", int), default=8000, metavar="N", help=port)
    hosts = "names that the Host header of a request may contain, in addition to localhost, 127.0.0.1 and ::1"
    add("--allowed-hosts", nargs="+", default=[], metavar="NAME", help=hosts)
    length = "maximum length of a request body (default: 10000000)"
    add("--max-body", type=positive, default=10_000_000, metavar="BYTES", help=length)
    add("--max-images", type=positive, default=32, metavar="N", help="maximum images per request (default: 32)")
    pixels = "maximum pixels per image (default: 25000000)"
    add("--max-pixels", type=positive, default=25_000_000, metavar="N", help=pixels)
    add("--max-batch", type=positive, default=16, metavar="N", help="maximum images per run of the model (default: 16)")
    queue = "maximum images in progress; further requests get status 503 (default: 128)"
    add("--queue", type=positive, default=128, metavar="N", help=queue)
    timeout = "maximum seconds until an answer (default: 60)"
    add("--timeout", type=within("(0, inf)"), default=60.0, metavar="S", help=timeout)
    add("--access-log", action="store_true", help="log each request on stderr")
    add_runtime_flags(parser)
    return parser
