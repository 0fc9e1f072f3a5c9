// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardhttp

import (
	"errors"
	"fmt"
	"net/http"
)

var (
	// errNotReplayed is the error of a dead letter whose request was answered 202
	// and not yet replayed when the intake was closed.
	errNotReplayed = errors.New("nethttp: closed before the request was replayed")

	// errUnfinished is the same for a request whose replay had begun and had not
	// returned: it may still succeed.
	errUnfinished = errors.New("nethttp: closed while the request was being replayed")

	// errConfig is what every refusal of a configuration begins with.
	errConfig = errors.New("nethttp: config")

	// errGone is the outcome of a handler that wrote nothing before the request's own
	// context had ended: the client has left, or the server or a middleware ended it.
	errGone = errors.New("nethttp: the request ended before there was an answer")

	// errRefused is the outcome of a handler whose answer was another intake's
	// refusal: it says nothing about this one's dependency.
	errRefused = errors.New("nethttp: refused by another intake")
)

// StatusError is the outcome of a handler that answered with a status that
// counts as a failure.
type StatusError struct {
	Status int
	// Text is the beginning of a replay's answer, which nobody else gets; empty
	// for a request whose client is there to read it.
	Text string
}

// rejects tells whether a replay's answer is about the request, and so no outcome of the
// dependency.
func (e *StatusError) rejects() bool {
	switch e.Status {
	case http.StatusRequestTimeout, http.StatusTooEarly, http.StatusTooManyRequests:
		return false
	}
	return e.Status >= 400 && e.Status < 500
}

func (e *StatusError) Error() string {
	text := fmt.Sprintf("nethttp: the handler answered %d %s", e.Status, http.StatusText(e.Status))
	if e.Text != "" {
		text += ": " + e.Text
	}
	return text
}
