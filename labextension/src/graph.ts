/** The lineage of save points as a graph, laid out in lanes as by `git log --graph`: newest first, one parent each. */

export interface INode {
  id: string;
  /** The node that this one descends from; empty for none. */
  parent: string;
}

/** The row of a node.  Lanes are numbered from the left, from 0. */
export interface IRow {
  lane: number;
  /** Lanes of lines that pass by, from the row above to that below. */
  passing: number[];
  /** Lanes of lines from its children, above. */
  children: number[];
  /** A line leads down to its parent. */
  hasParent: boolean;
}

/** Lay out nodes, each before its parent; a parent that comes before its child, or is none of them, is left out. */
export function layout(nodes: INode[]): IRow[] {
  const indices = new Map(nodes.map(({ id }, index) => [id, index]));
  const lanes: (string | null)[] = []; // the node that the line in each lane leads to
  return nodes.map(({ id, parent }, index) => {
    const children = indicesOf(lanes, each => each === id);
    const free = lanes.indexOf(null);
    const lane = children[0] ?? (free < 0 ? lanes.length : free);
    const passing = indicesOf(lanes, each => each !== null && each !== id);
    const hasParent = (indices.get(parent) ?? 0) > index;
    children.forEach(each => (lanes[each] = null));
    lanes[lane] = hasParent ? parent : null;
    return { lane, passing, children, hasParent };
  });
}

/** How many lanes rows need. */
export function width(rows: IRow[]): number {
  return Math.max(0, ...rows.flatMap(({ lane, passing, children }) => [lane, ...passing, ...children])) + 1;
}

function indicesOf<T>(values: T[], matches: (value: T) => boolean): number[] {
  return values.flatMap((value, index) => (matches(value) ? [index] : []));
}
