// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package console

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"slices"
	"time"

	"github.com/stormguard-mq/stormguard/internal/operator"
)

// A Change is one event of GET watch: the status, and the sources that changed since the
// event before. The first event has all sources. A source at rest, of which only the times
// change, is left out.
type Change struct {
	Status  Status   `json:"status"`
	Sources []Source `json:"sources"`
	Gone    []string `json:"gone,omitempty"` // sources that no longer exist: group, a space, name
}

const (
	watchEvery   = time.Second
	mostWatchers = 32               // limit at one time; each watcher reads all sources once a second
	stuckFor     = 10 * time.Second // a client that reads nothing for so long is disconnected
)

// watch sends changes as server-sent events until the client goes or the Console is closed.
func (c *Console) watch(w http.ResponseWriter, r *http.Request) {
	if c.watchers.Add(1) > mostWatchers {
		c.watchers.Add(-1)
		operator.Answer(w, http.StatusServiceUnavailable, map[string]string{"error": fmt.Sprintf("console: watch: %d are watching, the most is %d", mostWatchers, mostWatchers)})
		return
	}
	defer c.watchers.Add(-1)
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("Cache-Control", "no-store")
	w.Header().Set("X-Accel-Buffering", "no") // else nginx would buffer events
	out := http.NewResponseController(w)
	tick := time.NewTicker(watchEvery)
	defer tick.Stop()
	known := make(map[string][]byte)
	for {
		text, err := json.Marshal(c.change(known))
		if err != nil {
			return
		}
		_ = out.SetWriteDeadline(time.Now().Add(stuckFor)) // another kind of server may have no deadlines
		if _, err := fmt.Fprintf(w, "data: %s\n\n", text); err != nil {
			return
		}
		if out.Flush() != nil {
			return
		}
		select {
		case <-tick.C:
		case <-r.Context().Done():
			return
		case <-c.closed:
			return
		}
	}
}

// change returns the changes against known, and updates known.
func (c *Console) change(known map[string][]byte) Change {
	all, now := c.sources("*"), time.Now()
	ch := Change{Status: c.status(now, all), Sources: []Source{}}
	here := make(map[string]bool)
	for _, s := range all {
		key := s.Group + " " + s.Name // two guards of a process may read the same topic
		here[key] = true
		text, err := json.Marshal(timeless(s, now))
		if err != nil || bytes.Equal(text, known[key]) {
			continue
		}
		known[key] = text
		ch.Sources = append(ch.Sources, s)
	}
	for key := range known {
		if !here[key] {
			delete(known, key)
			ch.Gone = append(ch.Gone, key)
		}
	}
	return ch
}

// timeless returns a source in which the end of each hold replaces its time left, and
// without the age of its breaker's state. So only real changes show.
func timeless(s Source, now time.Time) Source {
	ends := func(left *float64) {
		if *left > 0 {
			*left = math.Round((float64(now.Unix()) + *left) / 10) // rounded to 10 s: the two clocks differ a little
		}
	}
	s.Breaker.Since = 0
	ends(&s.Breaker.Until)
	s.Holds = slices.Clone(s.Holds)
	for i := range s.Holds {
		ends(&s.Holds[i].Until)
	}
	return s
}
