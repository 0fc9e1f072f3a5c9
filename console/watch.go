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

// A Change is an event of GET watch: the status, and the sources that are not as they were
// in the event before. The first has all. A source at rest, of which nothing has changed
// but how long it has been so, is left out.
type Change struct {
	Status  Status   `json:"status"`
	Sources []Source `json:"sources"`
	Gone    []string `json:"gone,omitempty"` // sources that are no more: group, a space, name
}

const (
	watchEvery   = time.Second
	mostWatchers = 32               // at one time; each looks at all sources once a second
	stuckFor     = 10 * time.Second // a client that reads nothing for so long is left
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
	w.Header().Set("X-Accel-Buffering", "no") // nginx would keep events to itself
	out := http.NewResponseController(w)
	tick := time.NewTicker(watchEvery)
	defer tick.Stop()
	known := make(map[string][]byte)
	for {
		text, err := json.Marshal(c.change(known))
		if err != nil {
			return
		}
		_ = out.SetWriteDeadline(time.Now().Add(stuckFor)) // a server of another kind has none
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

// change is what is new to who knows what known has, and brings that up to date.
func (c *Console) change(known map[string][]byte) Change {
	all, now := c.sources("*"), time.Now()
	ch := Change{Status: c.status(now, all), Sources: []Source{}}
	here := make(map[string]bool)
	for _, s := range all {
		key := s.Group + " " + s.Name // guards of one process may read one topic
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

// timeless is a source with the instants at which something ends in place of the time that is
// left, and without the time for which its breaker has been so.
func timeless(s Source, now time.Time) Source {
	ends := func(left *float64) {
		if *left > 0 {
			*left = math.Round((float64(now.Unix()) + *left) / 10) // to 10 s: the two clocks differ a little
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
