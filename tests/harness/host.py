"""A real ComfyUI with the pack installed, in a process of its own, driven over HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp
import psutil

from tests.harness.places import ROOT, host_folder

# Spaces, accents and letters outside Latin-1: folders that users have.
ODD_FOLDER_NAME = "Low-VRAM LoRA ünï côde 低显存"
NOT_PRODUCT = (".*", "tests", "dev.py", "__pycache__")
START_TIMEOUT_S = 180.0
POLL_S = 0.2

Event = dict[str, Any]
OnEvent = Callable[[Event], None]


class HostError(RuntimeError):
    """A prompt that ComfyUI refused or that failed in a node.

    Attributes:
        node_id: the node that failed; empty if the whole prompt was refused.
        class_type: its type.
        message: what the node said.
    """

    def __init__(self, node_id: str, class_type: str, message: str, trace: str = "") -> None:
        super().__init__(f"node {node_id or '-'} ({class_type or 'prompt'}): {message}\n{trace}".rstrip())
        self.node_id = node_id
        self.class_type = class_type
        self.message = message


class HostInterruptError(HostError):
    """A prompt that was cancelled while it ran."""


def free_port() -> int:
    """Return a port of the loopback interface that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def prepare_base(base: Path) -> None:
    """Make the folders that ComfyUI expects in its base directory."""
    for name in ("custom_nodes", "input", "output", "temp", "user", "elsewhere"):
        (base / name).mkdir(parents=True, exist_ok=True)
    for name in ("checkpoints", "loras"):
        (base / "models" / name).mkdir(parents=True, exist_ok=True)


def install_pack(base: Path, folder_name: str) -> None:
    """Put the checkout into ``custom_nodes``: as a link, or as a copy where links are not allowed."""
    place = base / "custom_nodes" / folder_name
    if place.exists():
        return
    try:
        place.symlink_to(ROOT, target_is_directory=True)
    except OSError:
        shutil.copytree(ROOT, place, ignore=shutil.ignore_patterns(*NOT_PRODUCT))


def offer_checkpoint(base: Path, file: Path) -> None:
    """Make one file a checkpoint of ComfyUI."""
    offer(base / "models" / "checkpoints", file)


def offer(folder: Path, file: Path) -> None:
    """Make one file appear in a folder of models: as a link, or as a copy where links are not allowed.

    Its own folder as a search path would do the same, but ComfyUI walks through all that is below such a folder.
    """
    place = folder / file.name
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.exists():
        return
    try:
        place.symlink_to(file.resolve())
    except OSError:
        shutil.copyfile(file, place)


def write_search_paths(file: Path, paths: Mapping[str, Path]) -> None:
    """Write an ``extra_model_paths.yaml`` that adds one folder to each of the named folder types."""
    lines = [f"  {name}: {json.dumps(str(path), ensure_ascii=False)}" for name, path in paths.items()]
    file.write_text("\n".join(["harness:", *lines, ""]), encoding="utf-8")


def device_flags() -> list[str]:
    """Return ``--cpu`` unless this machine has an accelerator."""
    import torch

    return [] if torch.cuda.is_available() or torch.backends.mps.is_available() else ["--cpu"]


def host_command(base: Path, port: int, flags: Sequence[str], search_paths: Mapping[str, Path]) -> list[str]:
    """Return the command that starts ComfyUI on ``base``."""
    command = [sys.executable, str(host_folder() / "main.py"), "--disable-auto-launch", "--disable-api-nodes"]
    command += ["--base-directory", str(base), "--database-url", "sqlite:///:memory:"]
    command += ["--listen", "127.0.0.1", "--port", str(port)]
    if search_paths:
        write_search_paths(base / "search_paths.yaml", search_paths)
        command += ["--extra-model-paths-config", str(base / "search_paths.yaml")]
    return [*command, *flags]


class HostProcess:
    """ComfyUI as a context manager. It starts from a working directory that holds nothing.

    Args:
        base: ComfyUI's base directory, made if it is not there.
        folder_name: what the pack's folder is called in ``custom_nodes``; None leaves the pack out.
        flags: more command line flags.
        search_paths: folders for ``extra_model_paths.yaml``, by folder type.
        environment: environment variables that are added.
    """

    def __init__(
        self,
        base: Path,
        *,
        folder_name: str | None = ODD_FOLDER_NAME,
        flags: Sequence[str] = ("--cpu",),
        search_paths: Mapping[str, Path] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.base = base.resolve()
        self.log = self.base / "host.log"
        self.client_id = uuid.uuid4().hex
        self._flags = flags
        self._search_paths = search_paths or {}
        self.environment = {**os.environ, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0
        prepare_base(self.base)
        if folder_name is not None:
            install_pack(self.base, folder_name)

    def __enter__(self) -> HostProcess:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def address(self) -> str:
        """Return where the front end is served."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Return the id of ComfyUI's process."""
        self._require_alive()
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start ComfyUI and wait until it answers."""
        self.port = free_port()
        command = host_command(self.base, self.port, self._flags, self._search_paths)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command, cwd=self.base / "elsewhere", env=self.environment, stdout=log, stderr=log
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._answers():
            self._require_alive()
            if time.monotonic() > deadline:
                raise TimeoutError(f"ComfyUI did not answer within {START_TIMEOUT_S:g} s:\n{self.log_tail()}")
            time.sleep(POLL_S)

    def close(self) -> None:
        """End ComfyUI and everything it started."""
        if self._process is None:
            return
        try:
            tree = psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            tree = []
        self._process.kill()
        for child in tree:
            if child.is_running():
                child.kill()
        self._process.wait()
        self._process = None

    def restart(self) -> None:
        """End ComfyUI and start it again on the same base directory."""
        self.close()
        self.start()

    def log_text(self) -> str:
        """Return all that ComfyUI has logged."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def log_tail(self, lines: int = 40) -> str:
        """Return the last lines of the log."""
        return "\n".join(self.log_text().splitlines()[-lines:])

    def get(self, path: str) -> Any:
        """Return the JSON at ``path``."""
        return json.loads(self.download(path))

    def download(self, path: str) -> bytes:
        """Return the bytes at ``path``."""
        with urllib.request.urlopen(self.address + path, timeout=60) as reply:
            return bytes(reply.read())

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Send ``body`` as JSON; return the JSON that comes back, or None."""
        headers = {"Content-Type": "application/json"}
        data = json.dumps(body).encode("utf-8")
        request = urllib.request.Request(self.address + path, data=data, headers=headers)
        with urllib.request.urlopen(request, timeout=60) as reply:
            text = reply.read()
        return json.loads(text) if text else None

    def object_info(self, class_type: str) -> dict[str, Any]:
        """Return what ComfyUI tells the front end of a node type; empty if it does not know it."""
        return dict(self.get(f"/object_info/{urllib.parse.quote(class_type)}").get(class_type, {}))

    def queue(self, prompt: Mapping[str, Any]) -> str:
        """Queue a graph in API format and return its id; raise ``HostError`` if it is refused."""
        try:
            reply = self.post("/prompt", {"prompt": prompt, "client_id": self.client_id})
        except urllib.error.HTTPError as error:
            raise refusal(json.loads(error.read())) from error
        # Some outputs may be fine: ComfyUI then runs those and leaves out the others.
        if reply.get("node_errors"):
            self.post("/queue", {"delete": [reply["prompt_id"]]})
            self.interrupt()
            raise refusal(reply)
        return str(reply["prompt_id"])

    def wait(self, prompt_id: str, timeout_s: float = 600.0, on_event: OnEvent | None = None) -> Event:
        """Return the history entry of a prompt when it has finished.

        Args:
            prompt_id: what ``queue`` returned.
            timeout_s: how long to wait.
            on_event: called with every message that ComfyUI sends to the browser meanwhile.

        Raises:
            HostError: a node failed; ``HostInterruptError`` if the prompt was cancelled.
        """
        if on_event is not None:
            return asyncio.run(self._listen(prompt_id, timeout_s, on_event))
        deadline = time.monotonic() + timeout_s
        while (entry := self._finished(prompt_id)) is None:
            self._require_time(deadline, prompt_id)
            time.sleep(POLL_S)
        return entry

    def run(self, prompt: Mapping[str, Any], timeout_s: float = 600.0, on_event: OnEvent | None = None) -> Event:
        """Queue a graph and wait for it."""
        return self.wait(self.queue(prompt), timeout_s, on_event)

    def interrupt(self) -> None:
        """Press Cancel."""
        self.post("/interrupt", {})

    def free(self) -> None:
        """Unload the models and drop the cached results of nodes."""
        self.post("/free", {"unload_models": True, "free_memory": True})

    def view(self, image: Mapping[str, str]) -> bytes:
        """Return the file of a picture that a node's output in the history names."""
        return self.download(f"/view?{urllib.parse.urlencode(image)}")

    def _answers(self) -> bool:
        try:
            self.get("/system_stats")
        except OSError:
            return False
        return True

    def _require_alive(self) -> None:
        if self._process is None or self._process.poll() is not None:
            raise RuntimeError(f"ComfyUI ended:\n{self.log_tail()}")

    def _require_time(self, deadline: float, prompt_id: str) -> None:
        self._require_alive()
        if time.monotonic() > deadline:
            raise TimeoutError(f"Prompt {prompt_id} did not finish in time:\n{self.log_tail()}")

    def _finished(self, prompt_id: str) -> Event | None:
        try:
            entry: Event | None = self.get(f"/history/{prompt_id}").get(prompt_id)
        except TimeoutError:
            return None  # a busy machine; the caller watches its own deadline
        if entry is None:
            return None
        raise_failure(entry)
        return entry

    async def _listen(self, prompt_id: str, timeout_s: float, on_event: OnEvent) -> Event:
        deadline = time.monotonic() + timeout_s
        address = f"{self.address}/ws?clientId={self.client_id}"
        async with aiohttp.ClientSession() as session, session.ws_connect(address, max_msg_size=0) as socket_:
            while (entry := self._finished(prompt_id)) is None:
                self._require_time(deadline, prompt_id)
                await _pass_on(socket_, on_event)
        return entry


async def _pass_on(socket_: aiohttp.ClientWebSocketResponse, on_event: OnEvent) -> None:
    """Pass on the messages that come until there is none for a moment, or the prompt ends."""
    while True:
        try:
            message = await socket_.receive(timeout=POLL_S)
        except asyncio.TimeoutError:
            return
        if message.type == aiohttp.WSMsgType.TEXT:
            event = json.loads(message.data)
            on_event(event)
            if event.get("type") in ("execution_success", "execution_error", "execution_interrupted"):
                return
        elif message.type != aiohttp.WSMsgType.BINARY:
            return


def refusal(reply: Mapping[str, Any]) -> HostError:
    """Return the error that stands for ComfyUI's reply to a prompt it refused."""
    for node_id, problem in (reply.get("node_errors") or {}).items():
        details = "; ".join(f"{e['message']}: {e['details']}" for e in problem["errors"])
        return HostError(node_id, problem["class_type"], details)
    error = reply.get("error")
    return HostError("", "", str(error.get("message") if isinstance(error, dict) else error))


def raise_failure(entry: Mapping[str, Any]) -> None:
    """Raise the error of a history entry, if it has one."""
    for kind, data in entry["status"]["messages"]:
        if kind == "execution_interrupted":
            raise HostInterruptError(str(data["node_id"]), data["node_type"], "interrupted")
        if kind == "execution_error":
            trace = "".join(data.get("traceback", ()))
            raise HostError(str(data["node_id"]), data["node_type"], data["exception_message"], trace)


def executed_nodes(entry: Mapping[str, Any], prompt: Mapping[str, Any]) -> set[str]:
    """Return the ids of the nodes that ran, rather than being answered from ComfyUI's cache."""
    cached: set[str] = set()
    for kind, data in entry["status"]["messages"]:
        if kind == "execution_cached":
            cached.update(data["nodes"])
    return set(prompt) - cached


def texts(entry: Mapping[str, Any], node_id: str) -> str:
    """Return the text that a node shows."""
    return "\n".join(str(line) for line in entry["outputs"].get(node_id, {}).get("text", ()))
