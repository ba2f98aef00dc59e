"""``topk-registry serve``: an exported model over HTTP, with a page to try it on."""

from collections.abc import Sequence
from typing import Any

from topk_export.commands.common import add_runtime_flags, command, say
from topk_export.errors import ModelFileError
from topk_registry.cli import ArgumentParser, positive, within
from topk_registry.folders.images import listed

PIXELS = 25_000_000  # phones take 12 to 24 million; a decoded image of this size is 75 MB
LOOPBACK = ("localhost", "127.0.0.1", "::1")


@command
def main(argv: Sequence[str]) -> int:
    """Serve an exported file over HTTP."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.group is not None and args.require_group:
        parser.error("--group is the group of requests that name none, which --require-group refuses")
    if args.triton:
        from topk_export.serve.triton import write_repository

        print(write_repository(args.model, args.triton, max_batch_size=args.max_batch, ensemble=args.ensemble))
        return 0
    if args.site:
        from topk_export.serve.site import write_site

        print(write_site(args.model, args.site, args.onnxruntime_web))
        return 0
    try:
        from topk_export.serve.server import Plan, listen, serve_forever
        from topk_export.serve.workers import Workers
    except ModuleNotFoundError as error:
        raise ImportError(f"{error.name} is not installed: pip install 'topk-registry[serve]'") from error
    from topk_export.runtime.ranking import check_outputs
    from topk_export.serve.releases import Releases, open_release

    plan = Plan(_model(args), _limits(args), _access(args), tuple(args.trusted_proxies), args.log, args.watch)
    with Releases(args.model) as releases:
        release = releases.read()
        assert release is not None
        releases.keep(release)
        predictor = open_release(release, plan.model)
        check_outputs(predictor.output_names, predictor.metadata)
        predictor.metadata.preprocess.check_known()
        names = predictor.metadata.group_names
        if args.require_group and not names:
            raise ModelFileError(f"--require-group expects a file with thresholds by group, {args.model} has none")
        listener = listen(args.host, args.port)
        host = f"[{args.host}]" if ":" in args.host else args.host
        url = f"http://{host}:{listener.getsockname()[1]}/"
        say(f"{args.model} on {predictor.device}: {url} (API at {url}docs, metrics at {url}metrics)")
        say(f"serving version {release.version}, SHA-256 {release.sha256}")
        if names and args.group is None and not args.require_group:
            say(f"note: requests name a group, {listed(names)}; without one the largest of their thresholds serves")
        if args.host not in LOOPBACK and not plan.access.keys:
            say("warning: everyone who reaches this address may use the service: see --api-key-file")
        with listener:
            if args.workers > 1:
                del predictor
                return Workers(listener, plan, args.workers, releases).run()
            serve_forever(listener, predictor, plan, releases)
    return 0


def _model(args: Any) -> dict[str, Any]:
    return {
        "device": args.device,
        "require_gpu": args.require_gpu,
        "threads": args.threads,
        "bound_batch": args.max_batch if args.cuda_graph else None,
        "cuda_graph": args.cuda_graph,
        "max_pixels": args.max_pixels,
        "exif": args.exif,
        "group": args.group,
    }


def _limits(args: Any) -> Any:
    from topk_export.serve.limits import Limits

    return Limits(
        body_bytes=args.max_bytes,
        request_seconds=args.timeout,
        idle_seconds=args.idle_timeout,
        images=args.max_images,
        answer_bytes=args.max_answer,
        max_set=args.max_set,
        queue=args.max_queue,
        client_requests=args.max_per_client,
        batch=args.max_batch,
        delay_seconds=args.max_delay / 1e3,
        require_group=args.require_group,
    )


def _access(args: Any) -> Any:
    from topk_export.serve.guard import read_keys
    from topk_export.serve.limits import Access

    # a page of any site can send a browser to a loopback address under a name of its own
    hosts = args.allowed_hosts or (LOOPBACK if args.host in LOOPBACK else ())
    return Access(
        keys=read_keys(args.api_key_file) if args.api_key_file else (),
        hosts=() if "*" in hosts else tuple(hosts),
        origins=tuple(args.cors_origin),
        log=args.access_log,
    )


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="topk-registry serve", description=main.__doc__)
    parser.add_argument("model", metavar="model.onnx", help="a file of topk-registry export")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine only)"
    )
    parser.add_argument(
        "--port",
        type=within("[0, 65535]", int),
        default=8000,
        help="port to listen on; 0 takes a free one (default: 8000)",
    )
    parser.add_argument(
        "--workers", type=positive, default=1, metavar="N", help="processes, each with the model (default: 1)"
    )
    parser.add_argument(
        "--watch",
        action="store_true",
        help="serve a new content of the file as soon as it is written (default: on SIGHUP)",
    )
    parser.add_argument(
        "--group", metavar="NAME", help="the group of images whose request names none, where thresholds are by group"
    )
    parser.add_argument(
        "--require-group", action="store_true", help="refuse requests that name no group, where thresholds are by group"
    )
    parser.add_argument("--exif", action="store_true", help="turn images as EXIF says (timm's evaluation does not)")
    parser.add_argument("--log", metavar="FILE", help="append a line a prediction, for topk-registry monitor")
    parser.add_argument("--triton", metavar="DIR", help="write a Triton Inference Server repository there, and stop")
    parser.add_argument(
        "--ensemble", action="store_true", help="with --triton: add an ensemble that takes encoded images"
    )
    parser.add_argument("--site", metavar="DIR", help="write a page that runs the model in the browser there, and stop")
    parser.add_argument(
        "--onnxruntime-web",
        metavar="DIR",
        default=".",
        help="with --site: folder where npm installed onnxruntime-web (default: here)",
    )
    parser.add_argument("--cuda-graph", action="store_true", help="run batches of --max-batch as one CUDA graph")
    add_runtime_flags(parser)

    limits = parser.add_argument_group("limits of each process")
    limits.add_argument(
        "--max-batch", type=positive, default=16, metavar="N", help="most images of one run of the model (default: 16)"
    )
    limits.add_argument(
        "--max-delay",
        type=within("[0, inf)"),
        default=5.0,
        metavar="MS",
        help="most milliseconds to wait for a batch to fill (default: 5)",
    )
    limits.add_argument(
        "--max-queue", type=positive, default=128, metavar="N", help="most requests at once (default: 128)"
    )
    limits.add_argument(
        "--max-per-client",
        type=positive,
        default=64,
        metavar="N",
        help="most requests at once from one address (default: 64)",
    )
    limits.add_argument(
        "--max-bytes",
        type=positive,
        default=10_000_000,
        metavar="N",
        help="most bytes of a request's body (default: 10 MB)",
    )
    limits.add_argument(
        "--max-answer",
        type=positive,
        default=50_000_000,
        metavar="N",
        help="most bytes of an answer with tensors, below /v2 (default: 50 MB)",
    )
    limits.add_argument(
        "--max-pixels", type=positive, default=PIXELS, metavar="N", help="most pixels of an image (default: 25 million)"
    )
    limits.add_argument(
        "--max-images", type=positive, default=32, metavar="N", help="most images of one request (default: 32)"
    )
    limits.add_argument(
        "--max-set", type=positive, default=1000, metavar="N", help="most classes of a set in an answer (default: 1000)"
    )
    limits.add_argument(
        "--timeout", type=within("(0, inf)"), default=30.0, metavar="S", help="most seconds for a request (default: 30)"
    )
    limits.add_argument(
        "--idle-timeout",
        type=within("(0, inf)"),
        default=10.0,
        metavar="S",
        help="most seconds of silence on a connection (default: 10)",
    )

    access = parser.add_argument_group("access; for TLS put a proxy in front")
    access.add_argument("--api-key-file", metavar="FILE", help="file of keys, one a line; a request must carry one")
    access.add_argument(
        "--allowed-hosts",
        nargs="+",
        default=(),
        metavar="NAME",
        help="names that the Host header may have ('*': any; default: as --host)",
    )
    access.add_argument(
        "--cors-origin",
        nargs="+",
        default=(),
        metavar="URL",
        help="sites whose pages may call the service ('*': any; default: none)",
    )
    access.add_argument(
        "--access-log", metavar="FILE", help="write a line of JSON for each request ('-': to standard output)"
    )
    access.add_argument(
        "--trusted-proxies", nargs="+", default=(), metavar="IP", help="proxies whose X-Forwarded-For names the client"
    )
    return parser
