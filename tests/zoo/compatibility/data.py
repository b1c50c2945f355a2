"""Rows about data: tables, files, databases, pictures."""

from __future__ import annotations

from .row import Row

ROWS = (
    Row(
        "numpy",
        "NumPy: arrays, views, a random generator",
        "import numpy as np, copy\nrng = np.random.default_rng(7)\na = rng.normal(size=(500, 400))\nv = a.T[::3]",
        "v[0, 0] = 3\nseen = [float(a.sum()), float((a @ a.T).sum()), float(copy.deepcopy(rng).normal()), a[0, 0] == 3]",
        "numpy",
    ),
    Row(
        "memmap",
        "NumPy: memory-mapped files",
        "import numpy as np\nm = np.memmap('mapped', dtype='i8', mode='w+', shape=(1000, 100))\nm[500] = 7",
        "m[1, 1] = 5\nm.flush()\nseen = [int(m.sum()), int(np.fromfile('mapped', dtype='i8').sum())]",
        "numpy",
    ),
    Row(
        "scipy",
        "SciPy: sparse matrices, an integration half-way",
        "import copy, numpy as np, scipy.sparse as sp, scipy.integrate as si\n"
        "m = sp.random(300, 300, 0.05, format='csr', random_state=1)\n"
        "ode = si.RK45(lambda t, y: -y, 0, np.ones(50), 10)\n[ode.step() for _ in range(5)]",
        "go = copy.deepcopy(ode)\ngo.step()\nseen = [float(m.sum()), float((m @ m).sum()), go.t, float(go.y.sum())]",
        "scipy",
    ),
    Row(
        "pandas",
        "pandas: tables, groups, a file read in chunks",
        "import pandas as pd\nt = pd.DataFrame({'a': range(1000), 'b': list('xyzw') * 250})\ng = t.groupby('b')\n"
        "t.to_csv('t.csv')\nreader = pd.read_csv('t.csv', chunksize=10)\nnext(reader)\nn = [0]",
        "n[0] += 1\nchunk = next(reader)\n"
        "seen = [int(chunk['a'].iloc[0]) == 10 * n[0], g['a'].sum().to_dict(), str(t.dtypes['b'])]",
        "pandas",
    ),
    Row(
        "polars",
        "polars: tables, lazy queries, its threads",
        "import polars as pl\nt = pl.DataFrame({'a': range(100000), 'b': ['x', 'y'] * 50000})\n"
        "q = t.lazy().group_by('b').agg(pl.col('a').sum()).sort('b')\nq.collect()",
        "seen = [q.collect().rows(), t.select(pl.col('a').mean()).item()]",
        "polars",
    ),
    Row(
        "duckdb",
        "DuckDB: in memory, in a file, a query half read",
        "import duckdb\nd = duckdb.connect()\nd.execute('create table t as select range a from range(100000)')\n"
        "f = duckdb.connect('d.duckdb')\nf.execute('create table if not exists u as select 42 b')\n"
        "c = d.cursor()\nc.execute('select a from t order by a')\nn = [c.fetchone()[0]]",
        "n[0] += 1\nseen = [c.fetchone()[0] == n[0], d.execute('select sum(a) from t').fetchone()[0], "
        "f.execute('select b from u').fetchall()]",
        "duckdb",
    ),
    Row(
        "pyarrow",
        "PyArrow: tables, a memory-mapped file",
        "import pyarrow as pa, pyarrow.feather as pf, pyarrow.compute as pc\nt = pa.table({'a': range(100000)})\n"
        "pf.write_feather(t, 't.feather', compression='uncompressed')\nm = pf.read_table('t.feather', memory_map=True)",
        "seen = [pc.sum(m['a']).as_py(), pc.sum(t['a']).as_py(), m.num_rows]",
        "pyarrow",
    ),
    Row(
        "h5py",
        "h5py: a file open for writing",
        "import h5py, numpy as np\nf = h5py.File('f.h5', 'w')\nd = f.create_dataset('d', (100, 100), chunks=True)\nd[3] = 7",
        "d[4] = 1\nf.flush()\nseen = [float(d[...].sum()), list(f), f.mode]",
        "h5py",
    ),
    Row(
        "zarr",
        "zarr: an array on the disk, its event loop",
        "import zarr\nz = zarr.open('z.zarr', mode='w', shape=(100, 100), chunks=(10, 10), dtype='i4')\nz[3] = 7",
        "z[4] = 1\nseen = [int(z[...].sum()), z.shape]",
        "zarr",
    ),
    Row(
        "xarray",
        "xarray: labelled arrays, lazily from the disk",
        "import xarray as xr, numpy as np\n"
        "x = xr.Dataset({'t': (('a', 'b'), np.arange(10000.).reshape(100, 100))})\n"
        "x.to_zarr('x.zarr', mode='w')\ny = xr.open_zarr('x.zarr')",
        "seen = [float(y.t.mean()), float(x.t[:10].sum())]",
        "xarray zarr dask",
    ),
    Row(
        "sqlite",
        "sqlite3: a file in a transaction, a database in memory",
        "import sqlite3\nf = sqlite3.connect('f.db')\nf.execute('create table if not exists t(a)')\nf.commit()\n"
        "f.execute('insert into t values (7)')\nm = sqlite3.connect(':memory:')\n"
        "m.executescript('create table t(a); insert into t values (8), (9)')",
        "other = sqlite3.connect('f.db')\nseen = [f.in_transaction, f.execute('select count(*) from t').fetchone(), "
        "other.execute('select count(*) from t').fetchone(), m.execute('select sum(a) from t').fetchone()]\nother.close()",
    ),
    Row(
        "sqlalchemy",
        "SQLAlchemy: an engine's pool, a session with changes",
        "import sqlalchemy as sa\nfrom sqlalchemy.orm import declarative_base, Session\nBase = declarative_base()\n"
        "class T(Base):\n    __tablename__ = 't'\n    a = sa.Column(sa.Integer, primary_key=True)\n"
        "e = sa.create_engine('sqlite:///a.db')\nBase.metadata.create_all(e)\ns = Session(e)\ns.add(T(a=5))\ns.flush()",
        "seen = [s.in_transaction(), s.get(T, 5).a, s.query(T).count(), e.pool.checkedout()]",
        "sqlalchemy",
    ),
    Row(
        "matplotlib-inline",
        "matplotlib: inline figures",
        "%matplotlib inline\nimport matplotlib.pyplot as plt, io\nfig, ax = plt.subplots()\nax.plot([1, 3, 2])",
        "out = io.BytesIO()\nfig.savefig(out, format='raw')\nimport hashlib\n"
        "seen = [hashlib.sha256(out.getvalue()).hexdigest(), plt.get_backend(), len(ax.lines)]",
        "matplotlib",
    ),
    Row(
        "matplotlib-widget",
        "matplotlib: interactive figures (%matplotlib widget)",
        "%matplotlib widget\nimport matplotlib.pyplot as plt\nfig, ax = plt.subplots()\n(line,) = ax.plot([1, 3, 2])\n"
        "plt.show()",
        "line.set_ydata([1, 3, 4])\nfig.canvas.draw()\nfig.canvas.flush_events()\n"
        "seen = [type(fig.canvas).__module__, fig.canvas.comm is not None, list(map(float, line.get_ydata()))]",
        "matplotlib ipympl",
    ),
    Row(
        "seaborn",
        "seaborn and statsmodels: a plot, a fitted model",
        "import seaborn as sns, pandas as pd, numpy as np, statsmodels.api as sm\n"
        "t = pd.DataFrame({'x': np.arange(50.), 'y': np.arange(50.) * 2 + 1})\nax = sns.scatterplot(t, x='x', y='y')\n"
        "fit = sm.OLS(t.y, sm.add_constant(t.x)).fit()",
        "seen = [fit.params.round(6).tolist(), len(ax.collections), ax.get_xlabel()]",
        "seaborn statsmodels",
    ),
    Row(
        "pillow",
        "Pillow: pictures, an animation at a frame",
        "from PIL import Image\np = Image.effect_mandelbrot((100, 100), (-2, -1, 1, 1), 50)\n"
        "p.save('p.gif', save_all=True, append_images=[p.rotate(90)])\nm = Image.open('p.gif')\nm.seek(1)",
        "import hashlib\nseen = [hashlib.sha256(p.tobytes()).hexdigest(), m.tell(), m.n_frames]",
        "pillow",
    ),
    Row(
        "networkx",
        "networkx: graphs",
        "import networkx as nx\ng = nx.gnp_random_graph(200, 0.1, seed=3)\nwalk = nx.bfs_edges(g, 0)\nnext(walk)\nn = []",
        "n.append(next(walk))\nfirst = list(nx.bfs_edges(g, 0))[1:len(n) + 1]\n"
        "seen = [n == first, g.number_of_edges(), nx.shortest_path_length(g, 0, 100)]",
        "networkx",
    ),
    Row(
        "sympy",
        "SymPy: expressions, its caches",
        "import sympy as sp\nx = sp.symbols('x')\ni = sp.integrate(sp.sin(x) ** 3, x)",
        "seen = [str(i), str(sp.diff(i, x).simplify()), sp.symbols('x') is x]",
        "sympy",
    ),
    Row(
        "sklearn",
        "scikit-learn: fitted models, threads (OpenMP)",
        "import numpy as np\nfrom sklearn.ensemble import RandomForestClassifier, HistGradientBoostingRegressor\n"
        "r = np.random.default_rng(0)\nx = r.normal(size=(400, 8))\ny = (x[:, 0] > 0).astype(int)\n"
        "m = RandomForestClassifier(20, random_state=0, n_jobs=2).fit(x, y)\n"
        "h = HistGradientBoostingRegressor(max_iter=10).fit(x, x[:, 1])",
        "seen = [m.predict(x).tolist() == y.tolist(), float(m.predict_proba(x).sum()), float(h.predict(x).sum().round(9))]",
        "scikit-learn",
    ),
    Row(
        "files",
        "files: written, read at a position, compressed",
        "import gzip\nw = open('w.txt', 'w')\nw.write('one\\n')\nw.flush()\nopen('r.txt', 'w').write('\\n'.join(map(str, range(100))))\n"
        "r = open('r.txt')\nr.readline()\nz = gzip.open('z.gz', 'wt')\nz.write('half')\nat = r.tell()",
        "r.seek(at)\nline = r.readline()\nw.write('x')\nw.flush()\nz.write('more')\nseen = [line, w.closed, z.closed]",
    ),
    Row(
        "tempfiles",
        "tempfile: named, unnamed, directories, spooled",
        "import tempfile, os\nnamed, un = tempfile.NamedTemporaryFile('w+'), tempfile.TemporaryFile('w+')\n"
        "d = tempfile.TemporaryDirectory()\ns = tempfile.SpooledTemporaryFile(max_size=5)\n"
        "[f.write('kept') and f.flush() for f in (named, un)]\ns.write(b'longer than five')",
        "for f in (named, un, s): f.seek(0)\nopen(d.name + '/in', 'w').write('x')\n"
        "seen = [named.read(), un.read(), s.read().decode(), os.path.exists(named.name), os.listdir(d.name)]",
    ),
    Row(
        "logging",
        "logging to files that rotate",
        "import logging, logging.handlers\nlog = logging.getLogger('row')\n"
        "h = logging.handlers.RotatingFileHandler('row.log', maxBytes=100000, backupCount=2)\n"
        "log.addHandler(h)\nlog.setLevel('INFO')\nlog.info('first')\nn = [1]",
        "log.info('more')\nn[0] += 1\nseen = [len(open('row.log').readlines()) == n[0], len(log.handlers)]",
    ),
)
