"""How the runtime's copies of the loader and of libraries are kept from an image's files."""

from __future__ import annotations

import pytest

from sandbox.boot import runtime

FOLDERS = b"\x01/lib/x86_64-linux-gnu/\0/usr/lib/x86_64-linux-gnu/\0/lib/\0/usr/lib/\0"
LOADER = b"ELF\0/etc/ld.so.cache\0 x\0/etc/ld.so.preload\0" + FOLDERS + b"/lib64/ld-linux-x86-64.so.2\0"


def test_the_loader_looks_at_no_file_of_an_image_and_in_our_folder() -> None:
    changed = runtime._without_places(LOADER)
    assert len(changed) == len(LOADER)
    assert b"/etc/" not in changed
    assert b"\x01/opt/sandbox/lib//////\0/opt/sandbox/lib//////////\0/nil/\0/usr/nil/\0/lib64/ld-linux" in changed


@pytest.mark.parametrize("loader", [b"ELF\0/etc/ld-musl-x86_64.path\0", LOADER.replace(FOLDERS, b"")])
def test_a_loader_of_another_kind_ends_the_build(loader: bytes) -> None:
    with pytest.raises(SystemExit):
        runtime._without_places(loader)


def test_libraries_look_for_their_own_files_in_ours() -> None:
    libc = b"\0/usr/lib/locale\0/usr/share/zoneinfo\0/usr/lib/x86_64-linux-gnu/gconv/gconv.cache\0/etc/rpc\0"
    changed = runtime._with_our_places(libc)
    assert changed == (
        b"\0/opt/sandbox/lc\0/opt/sandbox/tzdata\0/opt/sandbox/lib//////////gconv/gconv.cache\0/etc/rpc\0"
    )
    assert runtime._with_our_places(b"\0/usr/lib/ssl\0/usr/lib/ssl/cert.pem\0") == (
        b"\0/opt/sandbox\0/opt/sandbox/cert.pem\0"
    )


def test_a_program_that_has_our_loader_does_not_bring_the_bases_along() -> None:
    listing = (
        "\tlinux-vdso.so.1 (0x00)\n\tlibm.so.6 => /lib/libm.so.6 (0x01)\n\tlibx.so => not found\n"
        "\t/opt/sandbox/lib/ld-linux-x86-64.so.2 => /lib64/ld-linux-x86-64.so.2 (0x02)\n"
    )
    assert runtime._LISTED.findall(listing) == [("libm.so.6", "/lib/libm.so.6"), ("libx.so", "not found")]
