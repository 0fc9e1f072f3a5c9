// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package chaosrun

import (
	"bytes"
	"net"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stormguard-mq/stormguard/chaos"
)

// A fault of the network lasts until it has hit something, whatever the machine's speed. One
// that hits nothing for a minute is given up, and said.
func TestUntilHit(t *testing.T) {
	for kind, hit := range map[chaos.Kind]func(*network){
		chaos.Delay:     (*network).pass,
		chaos.Blackhole: (*network).pass,
		chaos.Reset: func(n *network) { // a consumer connects
			a, b := net.Pipe()
			n.mu.Lock()
			n.conns[a], n.conns[b] = true, true
			n.mu.Unlock()
		},
	} {
		f := chaos.Fault{Kind: kind, For: 1000}
		if kind == chaos.Reset {
			f.For = 0
		}
		for _, late := range []time.Duration{0, 10 * time.Second, 2 * stuckAfter} {
			synctest.Test(t, func(t *testing.T) {
				var said bytes.Buffer
				n := &network{conns: make(map[net.Conn]bool)}
				r := &run{record: newRecord(), stderr: &said, schedule: chaos.Schedule{Faults: []chaos.Fault{f}}, network: n}
				go func() {
					time.Sleep(late + time.Millisecond)
					hit(n)
				}()
				if err := r.faults(t.Context()); err != nil {
					t.Error(err)
				}
				given := late > stuckAfter
				if (r.fired[0].Count > 0) == given || strings.Contains(said.String(), string(kind)+" hit nothing") != given {
					t.Errorf("%s, hit after %v: count %d, said %q", kind, late, r.fired[0].Count, said.String())
				}
				time.Sleep(3 * stuckAfter) // until the hit has returned
			})
		}
	}
}
