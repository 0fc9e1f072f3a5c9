// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
)

// A source without a dead-letter writer warns when it is opened, once for its topic, and
// its state names the missing writer while a message waits for one.
func TestNoDeadLetterWriter(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		var logged bytes.Buffer
		g, err := New(Config{}, WithLogger(slog.New(slog.NewTextHandler(&logged, nil))))
		if err != nil {
			t.Fatal(err)
		}
		open := func(name, topic string, w dlq.Writer) (*Source[int], chan int, chan error) {
			s, err := Open(g, SourceConfig{Name: name, Destination: topic, DeadLetters: w}, Limits{}, &testPort{}, func(context.Context, int) error {
				return Permanent(errDown)
			})
			if err != nil {
				t.Fatal(err)
			}
			in, ended := make(chan int), make(chan error, 1)
			go func() { ended <- s.Run(t.Context(), in) }()
			return s, in, ended
		}
		warned := func() int { return strings.Count(logged.String(), "level=WARN") }
		open("orders/0", "orders", &testWriter{})
		if n := warned(); n != 0 {
			t.Fatalf("%d warnings for a source with a writer: %s", n, &logged)
		}
		s, in, _ := open("bills/0", "bills", nil)
		for i := range 3 {
			open(fmt.Sprint("bills/", i+1), "bills", nil)
		}
		text := logged.String()
		if warned() != 1 || !strings.Contains(text, "bills/0") || !strings.Contains(text, "WithDeadLetters") {
			t.Errorf("%s", text)
		}
		if open("other", "", nil); warned() != 2 {
			t.Errorf("%s", &logged)
		}
		in <- 1
		elapse(time.Minute)
		holds := s.State().Holds
		if len(holds) != 1 || holds[0].Reason != ReasonDLQ || !strings.Contains(holds[0].Detail, "no dead-letter writer") ||
			!strings.Contains(holds[0].ClearedBy, "DeadLetters") {
			t.Errorf("%+v", holds)
		}
		closeAll(t, g)
	})
}
