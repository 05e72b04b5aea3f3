"""What plain Python can do and a step must: code, and what its observation holds.

Most of it are packages that are not imported when a sandbox starts, or with stand-ins in them.
"""

# What can be reached from `sys.modules` and was made in a module of ours; nothing is, but for `__main__`.
OURS = """
import sys, types

def parts(thing):
    if isinstance(thing, dict):
        return [*thing.keys(), *thing.values()]
    if isinstance(thing, (list, tuple, set, frozenset)):
        return list(thing)
    held = list(vars(thing).values()) if hasattr(thing, '__dict__') else []
    if isinstance(thing, type):
        held += thing.__bases__
    if isinstance(thing, types.FunctionType):
        cells = [cell.cell_contents for cell in thing.__closure__ or () if cell != types.CellType()]
        held += [*(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values(), *cells]
    return held

def ours(thing):
    made = thing if isinstance(thing, (type, types.FunctionType)) else type(thing)
    return made.__module__.split('.')[0] == 'sandbox'

found, seen = [], {id(sys.modules['__main__']), id(globals())}
todo = [(name, module) for name, module in list(sys.modules.items())]
while todo:
    path, thing = todo.pop()
    if id(thing) in seen:
        continue
    seen.add(id(thing))
    try:
        found += [path] * ours(thing)
        todo += [(path, part) for part in parts(thing)]
    except (AttributeError, TypeError, ValueError, RuntimeError):
        continue
print(len(seen) > 10_000, sorted(set(found)))
"""

GRPC_AIO = """
import grpc
async def echo(request, context):
    return request + b'!'
async def talk():
    server = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(echo)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler('t.T', {'Echo': handler}),))
    server.add_insecure_port('unix:echo')
    await server.start()
    async with grpc.aio.insecure_channel('unix:echo') as channel:
        answer = await channel.unary_unary('/t.T/Echo')(b'heard')
    await server.stop(None)
    return answer
await talk()
"""

JINJA2 = """
import jinja2, os
os.makedirs('cache', exist_ok=True)
cache = jinja2.FileSystemBytecodeCache('cache')
for _ in range(2):
    templates = jinja2.Environment(loader=jinja2.DictLoader({'t': 'x is {{ x }}'}), bytecode_cache=cache)
    print(templates.get_template('t').render(x=5), len(os.listdir('cache')))
"""

CASES = (
    (GRPC_AIO, "b'heard!'"),
    (JINJA2, "\nx is 5 1\nx is 5 1\n"),
    ("jinja2.loaders.sha1(b'').hexdigest()[:8], jinja2.bccache.sha1 is jinja2.loaders.sha1", "('da39a3ee', True)"),
    (
        "import asyncio, jinja2\n"
        "t = jinja2.Environment(enable_async=True).from_string('{{ x }}')\n"
        "await t.render_async(x=3)",
        "\n3",
    ),
    (
        "import grpc._cython.cygrpc, asyncio\ngrpc._cython.cygrpc.asyncio is asyncio is grpc.aio._channel.asyncio",
        "True",
    ),
    ("import grpc\nfrom grpc import aio\naio is grpc.aio, aio.__name__", "(True, 'grpc.aio')"),
    (
        "from google.protobuf import json_format, struct_pb2, descriptor_pool\n"
        "made = json_format.ParseDict({'a': [1]}, struct_pb2.Struct())\n"
        "json_format.MessageToDict(made), descriptor_pool.python_message.__name__",
        "({'a': [1.0]}, 'google.protobuf.internal.python_message')",
    ),
    ("import asyncio\nasync def f(): return 5\nasyncio.iscoroutinefunction(f), await f()", "(True, 5)"),
    ("asyncio.get_running_loop", "<built-in function get_running_loop>"),
    (
        "from rich.console import Console\n"
        "from rich.table import Table\n"
        "table = Table('a')\n"
        "table.add_row('b')\n"
        "Console().print(table)",
        "┃ a ┃",
    ),
    ("import yaml\nyaml.safe_load('a: [1, 2]'), yaml.safe_dump({'b': 1})", "({'a': [1, 2]}, 'b: 1\\n')"),
    ("import ssl\nssl.create_default_context().check_hostname", "True"),
    (
        "import hashlib, hmac\nhashlib.sha256(b'x').hexdigest()[:8], len(hashlib.algorithms_available) > 9",
        "('2d711642', True)",
    ),
    (
        "import email.message, email.policy\n"
        "m = email.message.EmailMessage()\n"
        "m['Subject'] = 'é'\n"
        "email.message_from_bytes(bytes(m), policy=email.policy.default)['Subject']",
        "é",
    ),
    (
        "import http.client, http.cookies\nhttp.cookies.SimpleCookie('a=b')['a'].value, http.client.OK.value",
        "('b', 200)",
    ),
    ("import urllib.request\nurllib.request.urlopen('data:,hi').read()", "b'hi'"),
    ("import xml.etree.ElementTree as ET, xml.dom.minidom\nET.fromstring('<a><b/></a>')[0].tag", "b"),
    ("import sqlite3\nsqlite3.connect(':memory:').execute('select 6 * 7').fetchone()", "(42,)"),
    (
        "import requests, PIL.Image\n"
        "requests.Request('GET', 'http://x/').prepare().url, PIL.Image.new('1', (2, 3)).size",
        "('http://x/', (2, 3))",
    ),
    (
        "import huggingface_hub, dotenv\nhuggingface_hub.__version__ > '0', callable(dotenv.load_dotenv)",
        "(True, True)",
    ),
    (
        "import multiprocessing\n"
        "with multiprocessing.get_context('fork').Pool(2) as pool:\n"
        "    print(pool.map(abs, [-1, -2]))",
        "[1, 2]",
    ),
    (
        "import inspect, json\n"
        "inspect.getmodule(json.dumps).__name__, 'def dumps' in inspect.getsource(json.dumps)",
        "('json', True)",
    ),
    (
        "import importlib\nimportlib.reload(json).__name__, type(json.__spec__.loader).__name__",
        "('json', 'SourceFileLoader')",
    ),
    ("import pkgutil\nlen(pkgutil.get_data('json', 'decoder.py')) > 100", "True"),
    ("import unittest, doctest, logging.config, pdb, decimal\ndecimal.Decimal('0.1') + 1", "1.1"),
    # Who and where it is.
    ("import getpass\ngetpass.getuser()", "\nuser"),
    (
        "import os, pathlib\n"
        "os.path.expanduser('~') == str(pathlib.Path.home()) == os.getcwd() == os.environ['HOME']",
        "True",
    ),
    ("import tempfile\nwith tempfile.NamedTemporaryFile('w+') as f:\n    print(f.write('kept'))", "\n4\n"),
    ("import time\ntime.tzname, time.strftime('%Z', time.localtime(0))", "(('UTC', 'UTC'), 'UTC')"),
    (
        "import locale\nlocale.setlocale(locale.LC_ALL, ''), locale.getpreferredencoding().upper()",
        "('C.UTF-8', 'UTF-8')",
    ),
    ("import site, os\nos.makedirs(site.getuserbase())\nos.path.isdir(os.path.expanduser('~/.local'))", "True"),
    (
        "import platform, socket, sys\n"
        "platform.python_version() == sys.version.split()[0], socket.gethostname() != ''",
        "(True, True)",
    ),
    (OURS, "\nTrue []\n"),  # last, as to look at a module that is loaded late loads it
)
