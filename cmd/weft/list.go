// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"slices"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/weftmesh/weft/api"
)

// listing is a list of objects, in every form in which it can be asked for.
type listing[T any] struct {
	kind    string // of the list
	columns []column[T]
	// key names an object among the others of the list.
	key   func(*T) string
	fetch func(ctx context.Context, args []string) ([]T, error) // in the order in which it is shown
	// settled leaves out what changes without anything having happened; nil if there is nothing of the kind.
	settled func(T) T
}

// column is what a table shows of an object.
type column[T any] struct {
	title string
	cell  func(*T) string
	wide  bool  // only shown if all are asked for
	when  *bool // the same, or if it is true
}

// kindWatchEvent is what --watch prints for programs.
const kindWatchEvent = "WatchEvent"

// watchEvent is what has become of an object of a list.
type watchEvent[T any] struct {
	api.Meta
	Event  string `json:"event"` // added, changed or removed
	Object T      `json:"object"`
}

// minWatchInterval keeps a watch from being a load: each look is a whole list.
const minWatchInterval = 100 * time.Millisecond

// listCommand prints a list once, or, with --watch, goes on with what changes in it.
func listCommand[T any](env environment, use, short string, l listing[T]) *cobra.Command {
	var (
		out   *output
		watch *watchFlags
	)
	cmd := newCommand(use, short, func(cmd *cobra.Command, args []string) error {
		if err := watch.check(); err != nil {
			return err
		}
		items, err := l.fetch(cmd.Context(), args)
		if err != nil {
			return err
		}
		if watch.on {
			w := &listWatch[T]{listing: &l, env: env, out: out, known: make(map[string]known[T])}
			return w.run(cmd.Context(), args, items, watch)
		}
		if out.forPrograms() {
			return out.object(env.stdout, api.List[T]{Meta: api.MetaOf(l.kind), Items: present(items)})
		}
		t := out.table(env.stdout, l.titles(out)...)
		for i := range items {
			t.row(l.cells(out, &items[i])...)
		}
		return t.flush()
	})
	out = outputFlags(cmd)
	watch = newWatchFlags(cmd.Flags(), "go on with what is added, changes or is removed; an object is then a line of JSON")
	return cmd
}

// watchFlags ask a command to go on.
type watchFlags struct {
	on       bool
	interval time.Duration
}

func newWatchFlags(flags *pflag.FlagSet, usage string) *watchFlags {
	w := new(watchFlags)
	flags.BoolVarP(&w.on, "watch", "w", false, usage)
	flags.DurationVar(&w.interval, "interval", time.Second, "how often --watch looks, a `duration`")
	return w
}

func (w *watchFlags) check() error {
	if w.interval < minWatchInterval {
		return usagef("--interval %s: want at least %s", w.interval, minWatchInterval)
	}
	return nil
}

// again calls look at every interval. It ends with ctx, or with an error of look.
func (w *watchFlags) again(ctx context.Context, look func() error) error {
	ticker := time.NewTicker(w.interval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
		if err := look(); err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return err
		}
	}
}

// onlyOfCluster adds the option that leaves out the objects of all other clusters.
func onlyOfCluster(cmd *cobra.Command, env environment, cluster *string, of string) {
	cmd.Flags().StringVar(cluster, "cluster", "", "only "+of+" of this cluster, by `name`, or by its number where no name is known")
	someCluster.completesFlag(cmd, env, "cluster")
}

// ofCluster leaves out what other clusters have, if one is named. That nothing is left where there is no such cluster is an error.
func ofCluster[T any](ctx context.Context, c *clientOptions, cluster string, all []T, err error, of func(*T) string) ([]T, error) {
	if cluster == "" || err != nil {
		return all, err
	}
	all = slices.DeleteFunc(all, func(item T) bool { return of(&item) != cluster })
	if len(all) == 0 {
		err = knowCluster(ctx, c, cluster)
	}
	return all, err
}

// plural makes a noun known by its plural, too.
func plural(name string, cmd *cobra.Command) *cobra.Command {
	cmd.Aliases = append(cmd.Aliases, name)
	return cmd
}

func (c *column[T]) shown(out *output) bool {
	return out.full() || c.when != nil && *c.when || c.when == nil && !c.wide
}

func (l *listing[T]) titles(out *output) []string {
	var titles []string
	for _, c := range l.columns {
		if c.shown(out) {
			titles = append(titles, c.title)
		}
	}
	return titles
}

func (l *listing[T]) cells(out *output, item *T) []string {
	var cells []string
	for _, c := range l.columns {
		if c.shown(out) {
			cells = append(cells, c.cell(item))
		}
	}
	return cells
}

// listWatch shows the differences between one look at a list and the next.
type listWatch[T any] struct {
	*listing[T]
	env   environment
	out   *output
	known map[string]known[T]
}

// known is an object as it was last shown.
type known[T any] struct {
	object T
	text   []byte // as JSON, to compare by
}

// run ends with ctx, or when the list cannot be had any more.
func (w *listWatch[T]) run(ctx context.Context, args []string, items []T, watch *watchFlags) error {
	if err := w.compare(append([]string{"EVENT"}, w.titles(w.out)...), items); err != nil {
		return err
	}
	return watch.again(ctx, func() error {
		items, err := w.fetch(ctx, args)
		if err != nil {
			return err
		}
		return w.compare(nil, items)
	})
}

// compare shows what is new in items, and remembers it.
func (w *listWatch[T]) compare(titles []string, items []T) error {
	t := w.out.table(w.env.stdout, titles...)
	show := func(event string, object *T) error {
		if w.out.forPrograms() {
			return w.out.line(w.env.stdout, watchEvent[T]{Meta: api.MetaOf(kindWatchEvent), Event: event, Object: *object})
		}
		t.row(append([]string{event}, w.cells(w.out, object)...)...)
		return nil
	}
	now := make(map[string]known[T], len(items))
	for i := range items {
		compared := items[i]
		if w.settled != nil {
			compared = w.settled(compared)
		}
		text, err := json.Marshal(compared)
		if err != nil {
			return err
		}
		key := w.key(&items[i])
		now[key] = known[T]{items[i], text}
		before, was := w.known[key]
		switch {
		case !was:
			err = show("added", &items[i])
		case !bytes.Equal(before.text, text):
			err = show("changed", &items[i])
		}
		if err != nil {
			return err
		}
	}
	var gone []string
	for key := range w.known {
		if _, is := now[key]; !is {
			gone = append(gone, key)
		}
	}
	slices.Sort(gone)
	for _, key := range gone {
		object := w.known[key].object
		if err := show("removed", &object); err != nil {
			return err
		}
	}
	w.known = now
	return t.flush()
}
