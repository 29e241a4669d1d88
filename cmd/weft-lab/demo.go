// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
)

const (
	// patience bounds how long one thing of the story may take on a busy machine.
	patience       = 30 * time.Second
	demoTimeout    = 3 * time.Minute
	cleanupTimeout = 30 * time.Second
)

const picture = `
      cluster east (id 1)                              cluster west (id 2)
      etcd 172.18.1.100                                etcd 172.18.2.100

      east-1  172.18.1.1   fd00:18:1::1                west-1  172.18.2.1   fd00:18:2::1
        web   10.1.1.10    fd00:10:1:1::10               web   10.2.1.10    fd00:10:2:1::10
        db    10.1.1.11    fd00:10:1:1::11               db    10.2.1.11    fd00:10:2:1::11

      east-2  172.18.1.2   fd00:18:1::2                west-2  172.18.2.2   fd00:18:2::2
        web   10.1.2.10    fd00:10:1:2::10               web   10.2.2.10    fd00:10:2:2::10
        db    10.1.2.11    fd00:10:1:2::11               db    10.2.2.11    fd00:10:2:2::11

      service web 10.96.1.80  fd00:96:1::80            service web 10.96.2.80  fd00:96:2::80

      Every node and every pod is a network namespace; every node has an agent, and every cluster an etcd and an operator,
      of its own. The service is global: where a cluster has no backends of it, the other's are used.
`

// demo tells one story on a lab, step by step; each step checks what it tells.
type demo struct {
	*lab
	east1, west1, west2 nodePlan
	web                 map[string]podPlan // the pods web and db of each of these nodes, by node
	db                  map[string]podPlan
}

func newDemoCommand(env *environment) *cobra.Command {
	var keep bool
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Build the lab, show and check what weft does in it, and remove it",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			l, err := env.labWithWeft()
			if err != nil {
				return err
			}
			if err := requireTools("bpftool", "ip"); err != nil {
				return err
			}
			return l.runDemo(cmd.Context(), keep)
		},
	}
	cmd.Flags().BoolVar(&keep, "keep", false, "leave the lab up at the end")
	return cmd
}

// runDemo builds a lab, tells the story and takes the lab down, also after a failure and when ctx ends.
func (l *lab) runDemo(ctx context.Context, keep bool) (err error) {
	start := time.Now()
	unlock, err := l.lock(true)
	if err != nil {
		return err
	}
	defer unlock()
	story, cancel := context.WithTimeoutCause(ctx, demoTimeout, fmt.Errorf("the demo has taken longer than %s", demoTimeout))
	defer cancel()
	if err = l.replace(story); err == nil {
		err = newDemo(l).tell(story)
	}
	if story.Err() != nil {
		err = context.Cause(story)
	}
	if err != nil {
		l.say("\n  ✗ %v", err)
	}
	if cleanup := l.endDemo(ctx, keep); cleanup != nil {
		l.say("  ✗ %v", cleanup)
		err = errors.Join(err, cleanup)
	}
	if err != nil {
		l.say("\nThe demo failed, see ✗ above.")
		return errNotWell
	}
	l.say("\nThat was weft, in %.0f seconds.", time.Since(start).Seconds())
	return nil
}

// endDemo takes the lab down unless it is to be kept, whether or not ctx has ended.
func (l *lab) endDemo(ctx context.Context, keep bool) error {
	if keep {
		l.say("\nThe lab stays up, as asked: `weft-lab down` removes it.")
		return nil
	}
	l.say("\nCleaning up")
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTimeout)
	defer cancel()
	if err := l.down(ctx); err != nil {
		return err
	}
	l.done("processes, mounts, network namespaces and %s are gone", l.dir)
	return nil
}

// replace takes down whatever lab is there and builds a new one.
func (l *lab) replace(ctx context.Context) error {
	if _, err := readManifest(l.dir); err == nil {
		l.say("A lab is up in %s: the demo takes it down and builds its own.", l.dir)
		if err := l.tearDown(ctx); err != nil {
			return err
		}
		l.apiserver = "" // the story's services are files
	} else if !errors.Is(err, os.ErrNotExist) && !isSyntax(err) {
		return err
	}
	l.say("%s", picture)
	return l.up(ctx)
}

func newDemo(l *lab) *demo {
	d := &demo{lab: l, web: make(map[string]podPlan), db: make(map[string]podPlan)}
	for _, n := range l.nodes() {
		d.web[n.Name], d.db[n.Name] = n.Pods[0], n.Pods[1]
		switch n.Name {
		case "east-1":
			d.east1 = n
		case "west-1":
			d.west1 = n
		case "west-2":
			d.west2 = n
		}
	}
	return d
}

// tell tells the story; the first step that does not hold ends it.
func (d *demo) tell(ctx context.Context) error {
	steps := []struct {
		title string
		run   func(context.Context) error
	}{
		{"The clusters are connected, as the agent of east-1 sees it", d.showStatus},
		{"Pods of east talk to a pod of west", d.showRequests},
		{"What the kernel of west-1, the receiving node, knew of them", d.showFlows},
		{"Where east-1's kernel has this from: the map that its agent has pinned", d.showMap},
		{"How east-1 reaches the pods: routes of protocol 119", d.showRoutes},
		{"A pod is added in west, and one is removed", d.showChange},
		{"One address in east, backends in both clusters: east's go, and return, under requests", d.showService},
		{"The agent of east-1 is killed under traffic", d.showCrash},
	}
	for i, step := range steps {
		d.say("\n%d. %s", i+1, step.title)
		if err := step.run(ctx); err != nil {
			return fmt.Errorf("step %d, %q: %w", i+1, strings.ToLower(step.title[:1])+step.title[1:], err)
		}
	}
	return nil
}

// command prints a command as the user would type it.
func (d *demo) command(format string, args ...any) { d.say("  $ "+format, args...) }

// quote prints text indented.
func (d *demo) quote(text string) {
	for line := range strings.Lines(text) {
		d.say("  │ %s", strings.TrimRight(line, "\n"))
	}
}
