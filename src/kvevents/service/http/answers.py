"""What holders of a prompt look like in the field's two spellings, written as bytes: this is the path of every request."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from kvevents.service.member import Row

_encode = msgspec.json.Encoder().encode


def _by_instance(rows: Iterable[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for each in rows:
        instance = each.member.instance
        if instance in found:
            found[instance].append(each)
        else:
            found[instance] = [each]
    return found


def dynamo(rows: Iterable[Row]) -> bytes:
    """As Dynamo's standalone indexer answers, with the trust of each rank."""
    scores: list[bytes] = []
    instances: list[bytes] = []
    for ranks in _by_instance(rows).values():
        name = _encode(ranks[0].member.instance)
        held = b",".join([b'"%d":%d' % (each.member.registration.rank, each.gpu) for each in ranks if each.gpu])
        if held:
            scores.append(b"%b:{%b}" % (name, held))
        device = b",".join([b'"%d":%d' % (each.member.registration.rank, each.gpu) for each in ranks])
        instances.append(
            b'%b:{"longest_matched":%d,"gpu":%d,"dp":{%b},"cpu":%d,"disk":%d,"trust":{%b}}'
            % (name, *_longest(ranks), device, max(each.cpu for each in ranks), max(each.disk for each in ranks), _trust(ranks))
        )
    return b'{"scores":{%b},"frequencies":[],"instances":{%b}}' % (b",".join(scores), b",".join(instances))


def mooncake(tenant: str, rows: Iterable[Row]) -> bytes:
    """As Mooncake Conductor answers, with the trust of each rank."""
    instances = [
        b'%b:{"longest_matched":%d,"GPU":%d,"DP":{%b},"CPU":%d,"DISK":%d,"trust":{%b}}'
        % (
            _encode(ranks[0].member.instance),
            *_longest(ranks),
            b",".join([b'"%d":%d' % (each.member.registration.rank, each.tokens) for each in ranks]),
            max(each.cpu for each in ranks),
            max(each.disk for each in ranks),
            _trust(ranks),
        )
        for ranks in _by_instance(rows).values()
    ]
    return b"{%b:{%b}}" % (_encode(tenant), b",".join(instances))


def _longest(ranks: list[Row]) -> tuple[int, int]:
    """On any tier, and on the device."""
    return max(each.tokens for each in ranks), max(each.gpu for each in ranks)


def _trust(ranks: list[Row]) -> bytes:
    return b",".join([b'"%d":%b' % (each.member.registration.rank, _encode(each.member.trusted.state)) for each in ranks])
