"""TensorBoard event files compared with published CRC values and read by an independent parser."""

import struct

from shardwright.runtime.run.tensorboard import EventFileWriter, crc32c


def test_crc_of_known_inputs():
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA  # RFC 3720, B.4
    assert crc32c(b"\xff" * 32) == 0x62A8AB43


def parse_fields(data: bytes) -> dict[int, list]:
    """Parse a protobuf message: field number -> its values."""
    values_by_field: dict[int, list] = {}
    position = 0

    def varint() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = data[position]
            position += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while position < len(data):
        key = varint()
        match key & 7:
            case 0:
                value = varint()
            case 1:
                value = struct.unpack("<d", data[position : (position := position + 8)])[0]
            case 2:
                length = varint()
                value = data[position : (position := position + length)]
            case 5:
                value = struct.unpack("<f", data[position : (position := position + 4)])[0]
        values_by_field.setdefault(key >> 3, []).append(value)
    return values_by_field


def test_written_events_are_read_back(tmp_path):
    events = EventFileWriter(tmp_path)
    events.add_scalars(300, {"train/ne": 0.5, "eval/auc": 0.75})
    events.add_scalars(2**40, {"train/ne": 0.25})
    (path,) = tmp_path.glob("events.out.tfevents.*")
    data, records = path.read_bytes(), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        for part, crc in ((data[:8], data[8:12]), (data[12 : 12 + length], data[12 + length : 16 + length])):
            value = crc32c(part)
            assert struct.unpack("<I", crc)[0] == ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF
        records.append(parse_fields(data[12 : 12 + length]))
        data = data[16 + length :]
    assert records[0][3] == [b"brain.Event:2"]
    assert [record[2] for record in records[1:]] == [[300], [2**40]]
    values = [parse_fields(value) for value in parse_fields(records[1][5][0])[1]]
    assert [(value[1], value[2]) for value in values] == [([b"train/ne"], [0.5]), ([b"eval/auc"], [0.75])]
