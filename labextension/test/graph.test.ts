import { layout, width } from '../src/graph';

/** The graph of `id parent` pairs, newest first, one text for each row: `*` a node, `|` a line that passes by. */
function drawn(...nodes: string[]): string[] {
  const rows = layout(
    nodes.map(node => {
      const [id = '', parent = ''] = node.split(' ');
      return { id, parent };
    })
  );
  return rows.map(({ lane, passing, children, hasParent }) => {
    const lanes = Array.from({ length: width(rows) }, (_, each) =>
      each === lane ? '*' : passing.includes(each) ? '|' : ' '
    );
    return `${lanes.join('').trimEnd()} ${children.join('')}${hasParent ? 'v' : ''}`;
  });
}

test('without parents they are a list', () => {
  expect(drawn('c', 'b', 'a')).toEqual(['* ', '* ', '* ']);
  expect([layout([]), width([])]).toEqual([[], 1]);
});

test('one after the other they are a line', () => {
  expect(drawn('c b', 'b a', 'a')).toEqual(['* v', '* 0v', '* 0']);
});

test('two that descend from one are two lanes, which meet in it', () => {
  expect(drawn('d a', 'c b', 'b a', 'a')).toEqual(['* v', '|* v', '|* 1v', '* 01']);
});

test('a lane that ends is used again', () => {
  expect(drawn('f b', 'e d', 'd', 'c a', 'b a', 'a')).toEqual(['* v', '|* v', '|* 1', '|* v', '*| 0v', '* 01']);
});

test('the lines of the older branch keep their lane where the newer one ends', () => {
  expect(drawn('d', 'c b', 'b', 'a')).toEqual(['* ', '* v', '* 0', '* ']);
  expect(drawn('d a', 'c b', 'a', 'b')).toEqual(['* v', '|* v', '*| 0', ' * 1']);
});

test('a parent that was deleted, is newer than its child, or the node itself is none', () => {
  expect(drawn('c gone', 'b a', 'a b')).toEqual(['* ', '* v', '* 0']);
  expect(drawn('b', 'a b', 'c c')).toEqual(['* ', '* ', '* ']);
});
