"""An executor's state as lines for people: nodes, classes, queues, devices in and out of service. Asks nobody, starts nothing."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

#: With more devices in service than this, they are told class by class; those out of service are always told one by one.
SINGLY = 16


def machine_lines(state: dict[str, Any]) -> list[str]:
    """A line each for nodes, queues and devices."""
    if not state:
        return ["nothing started yet"]
    if state.get("executor") != "ray":
        waiting = f", waiting: {state['waits_for']}" if state.get("waits_for") else ""
        return [f"in this process: {state.get('running') or 'nothing in hand'}{waiting}"]
    lines = [state["broken"]] if state.get("broken") else []
    lines += _nodes(state.get("nodes") or [])
    lines.append(f"{state['waiting']} waiting, {state['building']} being built, {state['built']} ready for a device")
    lines += [
        f"queue of {queue['class']}, {queue['target']}: {queue['to_build']} to build, {queue['to_judge']} to judge"
        for queue in state.get("queues") or []
    ]
    lines += _devices(state["devices"])
    return lines + ([f"Ray's dashboard: {state['dashboard']}"] if state.get("dashboard") else [])


def _nodes(nodes: list[dict[str, Any]]) -> list[str]:
    """Nothing on a single machine."""
    alive = [node for node in nodes if node["alive"]]
    if not nodes:
        return []
    gone = f"; {len(nodes) - len(alive)} left the cluster" if len(alive) < len(nodes) else ""
    return [f"{len(alive)} nodes with {sum(node['cpus'] for node in alive):g} CPUs{gone}"]


def _devices(devices: list[dict[str, Any]]) -> list[str]:
    out = [device for device in devices if device["out_of_service"]]
    serving = [device for device in devices if not device["out_of_service"]]
    if len(serving) <= SINGLY:
        lines = [_device(device) for device in serving]
    else:
        classes = defaultdict(list)
        for device in serving:
            classes[device.get("class") or "starting"].append(device)
        lines = [_class(name, held) for name, held in sorted(classes.items())]
    return lines + [f"{_name(device)}: out of service: {device['out_of_service']}" for device in out]


def _name(device: dict[str, Any]) -> str:
    node = f" of node {device['node']}" if device.get("node") else ""
    return f"{device['device']} ({device['about'] or 'not known yet'}){node}"


def _device(device: dict[str, Any]) -> str:
    if device.get("starting"):
        return f"{_name(device)}: starting, or waiting until another sweep leaves it"
    waits = f", waiting: {device['waits_for']}" if device.get("waits_for") else ""
    facts = f"; {told}" if (told := _facts(device.get("facts") or {})) else ""
    return (
        f"{_name(device)}: {device['busy']:.0%} busy{waits}, {device['in_hand']} in hand, {device.get('ended', 0)} ended{facts}"
    )


def _class(name: str, held: list[dict[str, Any]]) -> str:
    busy = sum(device["busy"] for device in held) / len(held)
    return (
        f"{len(held)} x {name}: {busy:.0%} busy, {sum(d['in_hand'] for d in held)} in hand, {sum(d['ended'] for d in held)} ended"
    )


def _facts(facts: dict[str, Any]) -> str:
    """Of a GPU: what it said that it is; of every device: what it gave to torch when it started."""
    said = []
    if "compute_capability" in facts:
        said.append(
            f"{facts['compute_capability']}, {facts['memory_bytes'] / 2**30:.0f} GiB{', MIG' if facts.get('mig') else ''}"
        )
    if "copy_bytes_per_s" in facts:
        flops = facts["matmul_flops_per_s"] / 1e12
        said.append(f"{facts['copy_bytes_per_s'] / 1e9:.3g} GB/s, {flops:.3g} TFLOP/s {facts['dtype']} measured")
    return ", ".join(said)
