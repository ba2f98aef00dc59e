"""``topk-registry serve``: an exported model over HTTP, with a page to try it on."""

import socket
from collections.abc import Sequence

from topk_export.commands.common import add_runtime_flags, command, say
from topk_export.runtime.preprocess import MAX_PIXELS
from topk_registry.cli import ArgumentParser, positive


@command
def main(argv: Sequence[str]) -> int:
    """Serve an exported file over HTTP."""
    args = _parser().parse_args(argv)
    if args.triton:
        from topk_export.serve.triton import write_repository

        print(write_repository(args.model, args.triton, max_batch_size=args.max_batch))
        return 0
    try:
        import uvicorn

        from topk_export.serve.app import Limits, create_app
    except ModuleNotFoundError as error:
        raise ImportError(f"{error.name} is not installed: pip install 'topk-registry[serve]'") from error
    from topk_export.runtime.predictor import Predictor

    predictor = Predictor(
        args.model,
        device=args.device,
        require_gpu=args.require_gpu,
        threads=args.threads,
        bound_batch=args.max_batch if args.cuda_graph else None,
        cuda_graph=args.cuda_graph,
        max_pixels=args.max_pixels,
        exif=args.exif,
    )
    limits = Limits(
        body_bytes=args.max_bytes, queue=args.max_queue, batch=args.max_batch, delay_seconds=args.max_delay / 1e3
    )
    listener = _listen(args.host, args.port)
    host = f"[{args.host}]" if ":" in args.host else args.host
    url = f"http://{host}:{listener.getsockname()[1]}/"
    say(f"{args.model} on {predictor.device}: {url} (API at {url}docs, metrics at {url}metrics)")
    config = uvicorn.Config(
        create_app(predictor, limits),
        log_level="warning",
        limit_concurrency=4 * args.max_queue,
        timeout_keep_alive=10,
        timeout_graceful_shutdown=10,
    )
    uvicorn.Server(config).run(sockets=[listener])
    return 0


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket, bound here so that port 0 can be told and a taken port is one line."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    # asyncio sets this on sockets of its own making only; without it every answer waits 40 ms for a delayed ACK
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="topk-registry serve", description=__doc__)
    parser.add_argument("model", metavar="model.onnx")
    parser.add_argument("--host", default="127.0.0.1", help="default: this machine only; there is no authentication")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one (default: 8000)")
    parser.add_argument("--max-batch", type=positive, default=16, metavar="N", help="inputs a run (default: 16)")
    parser.add_argument("--max-delay", type=float, default=5.0, metavar="MS", help="wait for company (default: 5 ms)")
    parser.add_argument("--max-queue", type=positive, default=128, metavar="N", help="then 503 (default: 128)")
    parser.add_argument(
        "--max-bytes", type=positive, default=10_000_000, metavar="N", help="of a body (default: 10 MB)"
    )
    parser.add_argument("--max-pixels", type=positive, default=MAX_PIXELS, metavar="N", help="of an image")
    parser.add_argument("--exif", action="store_true", help="turn images as EXIF says (timm's evaluation does not)")
    parser.add_argument("--triton", metavar="DIR", help="write a Triton Inference Server repository there, and stop")
    parser.add_argument("--cuda-graph", action="store_true", help="run batches of --max-batch as one CUDA graph")
    add_runtime_flags(parser)
    return parser
